"""The parts of the language-model example."""
