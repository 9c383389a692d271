"""Clusters of several nodes on one machine, to see a run over a network without having one."""
