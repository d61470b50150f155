"""What callers ask for, as SQL statements, and how their rows are read. No I/O."""
