"""What comes out of a simulation: metrics, the parameter tree of CFL, plots."""
