"""What tests of several suites share: real jobs (`job`), what is held against them (`torchrun`,
`verdict`), a core without processes (`core`), agents, machines, samples and reports.

Test modules import from here or from helper modules of their own suite, never from one another.
tests/README.md says what is where."""
