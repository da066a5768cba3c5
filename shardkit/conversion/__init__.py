"""The conversion engine: every source to every format.

plan.py       recipe, sources and target -> tasks
shares.py     which samples are in which split
cuts.py       where tasks begin and end
target.py     the output: a folder, or a single file
existing.py   what is at the output already
partial.py    OUT.partial: what an interrupted run left
lock.py       only one run at a time works there
store_partial.py  the same in a store
claim.py      only one run at a time works there
scratch.py    temporary folders of this machine, for work on a store
work.py       one task: read, check, write shards, count
read_ahead.py samples in their order after their steps, read ahead where that waits
shards.py     samples -> shards in a folder, used by tasks and by `create`
stats.py      what is counted meanwhile
pool.py       worker processes
outline.py    what publishing needs of a plan; parts of a conversion store it
parts.py      what parts agree on, and who of them is missing
publish.py    finished tasks -> a dataset in OUT.partial
commit.py     that dataset -> the output, in one rename
store_commit.py   the same in a store, the manifest last
run.py        a whole conversion: plan, work, publish
convert.py    `convert`: starts the workers, then all of it
merge.py      `merge`: publishes what parts have done
create.py     `create`: a user's own samples, one by one
"""
