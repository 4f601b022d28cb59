"""What a run and its plans show of themselves: reports, timelines, status, advice."""
