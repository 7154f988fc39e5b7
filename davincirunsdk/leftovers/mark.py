"""The variable that marks every process of a job."""

JOB_MARK = "DAVINCIRUN_JOB"
"""Its value is the job's mark, `outer/inner` for a job that a job's worker started."""
