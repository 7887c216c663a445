"""State in files: `checkpoint` by ranks that hold without a spare, `periodic` beside training."""
