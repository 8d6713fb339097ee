"""The entry point of `python -m trainkit` and of the console script."""

if __name__ != "__mp_main__":  # a spawned child imports this module and needs none of it
    from trainkit.cli import main_of_process as main

if __name__ == "__main__":
    main()
