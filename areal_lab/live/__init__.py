"""A run that continues, seen from any process: whether it is alive, what it does, what is asked.

presence  process.json: which process runs the folder, and in which phase it is
mailbox   requests.jsonl, replies.jsonl: pause, resume, eta and stop, and what became of them
snapshot  what a run does and waits for, from its log
attach    a live run as an object: `attach_run(folder)`, `live_runs(folder)`

May import `runlog` and the rooms below; imported by `pipeline`, which writes what is read here, and
by `cli`.
"""
