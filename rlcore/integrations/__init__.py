"""rlcore inside other training frameworks: a module for each, which imports that framework."""
