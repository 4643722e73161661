"""What goes wrong while training: hangs, numbers that are not finite, replicas that differ."""
