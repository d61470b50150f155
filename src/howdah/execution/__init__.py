"""One run of a job: its handler, its lease, its reports."""
