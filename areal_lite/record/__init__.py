"""What a run leaves behind: its folder, metrics, samples, event log, trace and report page."""
