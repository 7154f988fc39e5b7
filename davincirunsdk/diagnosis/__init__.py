"""What made a job fail: exit codes in words, known Ascend errors, the failure report."""

from davincirunsdk.diagnosis.exits import explain_exit
from davincirunsdk.diagnosis.matching import hint
from davincirunsdk.diagnosis.order import may_be_victim, order, was_leaving
from davincirunsdk.diagnosis.report import failure_report

__all__ = ["explain_exit", "failure_report", "hint", "may_be_victim", "order", "was_leaving"]
