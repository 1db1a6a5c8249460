"""What the Hugging Face examples share."""
