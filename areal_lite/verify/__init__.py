"""Scoring: how a verifier is named and called, built-in ones, and the pool of processes that can be killed."""
