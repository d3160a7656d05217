"""What a run says about itself: metric records, JSONL, live view, summary, timeline. No torch."""
