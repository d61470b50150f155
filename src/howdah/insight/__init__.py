"""Reads a queue's state: statistics, explain, doctor, find, filters, activity."""
