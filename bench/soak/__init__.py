"""`make soak`: a mixed load for half an hour, with a transaction held open for a part of it, and a verdict for every
curve: sizes, dead rows, times, memory, descriptors, threads and logs. It fails if a curve grows without a bound.

    __main__.py   the run: phases, processes, samples, verdicts, exit code
    load.py       the kinds of jobs, their rates, and what must be left of them
    app.py        the tasks that workers run
    producer.py   a process that enqueues, awaits results and cancels
    claimer.py    a process that claims one job at a time from a bare queue
    samples.py    what is read every few seconds from the server and from /proc
    curves.py     samples as named curves, each with its rule
    verdicts.py   the rules: flat, bounded, growing; pure functions
    counts.py     what must be in the database at the end
    report.py     docs/soak.md and its plots
"""
