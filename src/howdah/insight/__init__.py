"""What a queue is doing, and why: statistics, explain, doctor, find, filters, activity."""
