"""The points of a sweep: a grid, random points, or a search that depends on the results of ended jobs.

request         checks a sweep, lists or draws the points known before the first one runs, and runs it
trials          Optuna proposes points, receives every evaluation, and prunes jobs
"""
