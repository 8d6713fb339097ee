"""Predict the gain of more replicas: an event simulator, a model of a step's time, and its fit to measurements.
Pure.
"""
