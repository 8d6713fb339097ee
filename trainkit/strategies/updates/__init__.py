"""Updates of variables in one place by workers elsewhere: one scheduler, on threads of a process or over sockets."""
