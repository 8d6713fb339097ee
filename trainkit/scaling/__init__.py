"""Predict the gain of more replicas: one model of a step's time, fitted to measurements or drawn from assumptions.
Pure.
"""
