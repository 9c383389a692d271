"""Scoring: how a verifier is named and called, built-in ones, and the pools of processes that can be killed."""

from areal_lite.errors import VerifierUnavailable
from areal_lite.verify.result import VerifyResult, batched, prepared_by

__all__ = ["VerifierUnavailable", "VerifyResult", "batched", "prepared_by"]
