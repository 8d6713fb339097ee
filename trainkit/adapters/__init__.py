"""Transforms of a model or its optimizer before a strategy takes them."""
