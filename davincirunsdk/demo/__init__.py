"""A real data-parallel training to try the launcher with.

Run it with `davincirun --nproc-per-node 4 -m davincirunsdk.demo`. It uses nothing else of this package: what
it needs it reads from the variables that the launcher gives every worker, as any training script does.
"""
