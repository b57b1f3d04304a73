"""What a checkpoint costs to run, measured; each question is a file or a folder of its own."""
