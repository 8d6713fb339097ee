"""Processes and devices that work together: process groups, collectives and device meshes."""
