"""Maps of a model: its blocks, the syntax of `strategy.map`, the balance by bytes, and the layout over devices."""
