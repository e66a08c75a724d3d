"""What is sent: trace files, arrival processes, length distributions, prefix sharing."""
