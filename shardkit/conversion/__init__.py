"""The conversion engine: every source to every format.

plan.py       recipe, sources and target -> tasks
shares.py     which samples belong to which split
cuts.py       where tasks begin and end
target.py     the output: a folder, or a single file
existing.py   what already exists at the output
partial.py    OUT.partial: the working folder, from which an interrupted run resumes
lock.py       file locks that keep other runs out of it
store_partial.py  OUT.partial in a store
claim.py      claims that keep other runs out of it
scratch.py    temporary local folders for outputs in a store
work.py       one task: read, check, write shards, count
read_ahead.py a task's samples in order after the steps, with read-ahead
shards.py     samples -> shards in a folder, used by tasks and by `create`
stats.py      statistics of written samples
pool.py       worker processes
outline.py    what publishing needs of a plan; stored by the parts of a conversion
parts.py      what parts agree on, and which parts are missing
publish.py    finished tasks -> a dataset in OUT.partial
commit.py     that dataset -> the output, in one rename
store_commit.py   that dataset -> an output in a store, the manifest last
run.py        a whole conversion: plan, work, publish
convert.py    `convert`: starts the workers, then runs everything
merge.py      `merge`: publishes the finished work of parts
create.py     `create`: a user's own samples, one by one
"""
