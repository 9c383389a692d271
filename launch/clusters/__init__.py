"""A command as a job on many machines: a typed profile, one small file a kind of cluster, and attempts that resume."""
