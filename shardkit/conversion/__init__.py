"""The conversion engine: every source to every format.

plan.py      source and options -> tasks, and what identifies the run
partial.py   OUT.partial: what an interrupted run left, and the lock
work.py      one task: read, check, write shards, count
shards.py    samples -> shards in a folder, used by tasks and by `create`
pool.py      worker processes
publish.py   finished tasks -> a dataset, in one rename
run.py       a whole conversion: plan, work, publish
convert.py   `convert`: starts the workers, then all of it
create.py    `create`: a user's own samples, one by one
"""
