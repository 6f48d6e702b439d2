"""Measurements, each a program: `python -m tools.bench.NAME --help` from the repository's root.

core.tick, core.replay, core.scale   cost of the coordinator: turns, a replay, large clusters
scale_out     the control plane with 256 emulated replicas, whose coordinator is killed
museum        faults that others reported, planted in runs that must name them
resume_policies  responses lost and generated again by four policies of a resume
kills         faults of each role in a run that trains: kill, stop, slow, cut, disk
ettr          effective training time ratio of a run whose steps are hit by faults
soak          growth of memory, descriptors and threads under faults
power_cuts    kill -9 of all processes at once, then a resume
connections   cost of a run's keys
weights       the weight plane: hops, chains, a fetch next to a broadcast, the trainer's ranks
join          a machine that joins a run: time to its first token
engines       one generation engine: loads, mismatch with the trainer, speed
slow_tools    throughput with tools that answer late
turns         token identity over many turns with tools
repack        policies in virtual time: repack and weights in flight
race          time to a score: asynchronous against synchronous, learning in virtual time
paper         the Laminar paper's throughput table in virtual time
in_flight     weights in flight in real processes, against their model
beside_trl    the quickstart in Laminar and in TRL
"""
