"""A running or ended run, seen from any process: whether it is alive, its state, requests to it.

presence  process.json: the process that runs the folder, and its phase
mailbox   requests.jsonl, replies.jsonl: pause, resume, eta and stop, and the replies
snapshot  state of a run, and the reason why it waits, from its log
attach    a live run as an object: `attach_run(folder)`, `live_runs(folder)`

May import `runlog` and the rooms below; imported by `pipeline`, which writes what is read here, and
by `cli`.
"""
