"""What a sweep tries: a grid, points drawn at random, or a search that learns from the jobs that have ended.

asking    which points can be told before the first one runs, and what is wrong with what was asked for
drawing   points at random
halving   the better part of the jobs goes on, again and again, until one is left
trials    Optuna proposes, hears of every evaluation, and has hopeless jobs ended
sweeping  hands any of them to a launcher
"""
