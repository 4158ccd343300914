"""The algorithms of Feng & Huang (CVPR 2021), made exact."""
