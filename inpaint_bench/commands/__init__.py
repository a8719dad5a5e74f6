"""What every command needs, and what `launch` shares with the others: exit codes, arguments, help, repetitions."""
