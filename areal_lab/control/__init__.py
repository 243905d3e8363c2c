"""Pure decisions: what to start, train on, push, save and drop.

events       Event, Action and their members; Version, GroupId, EngineId
schedule     when generation runs ahead, and how new weights reach running responses
admission    how many groups may start (eq. 3)
order        which finished groups form a batch; backlog: its data structures
routing      which engine takes a group
sampling     which groups are replaced, because their rewards are all equal
scaling      number of engines that a run should have
limits       constants of a run
frontier     state of the groups in a checkpoint, from which a run continues
coordinator  all of these: events in, actions out
ranks        several programs instead of one controller, and the barrier between them
microbatch   how a batch is cut into micro-batches that fit into memory

May import the standard library and `areal_lab.capacity` only; imported by every room that runs or
replays decisions, and by `simulator`.
"""
