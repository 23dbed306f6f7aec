"""Command line: parse options, run a job and print its report; decides nothing."""
