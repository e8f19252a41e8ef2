"""Helpers that Python tests share."""
