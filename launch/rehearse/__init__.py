"""A cluster without having one, and faults without waiting for them: rehearsed on this machine."""
