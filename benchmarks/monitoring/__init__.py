"""What looking costs: timelines, and whatever else watches a run."""
