"""What a queue is doing, and why: explain, doctor, find, filters, activity."""
