"""What made a job fail: evidence in, a report out.

`judge.judge` is the one entry point; `explain.explain_folder` collects its evidence from a folder of logs.
"""
