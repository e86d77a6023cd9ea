package plan

import "github.com/landfall-lb/landfall/internal/lb"

// GracefulShutdown asks the peer to prefer any other route (RFC 8326).
var GracefulShutdown = lb.Community{A: 65535, B: 0}

// wellKnown are the names that need no Community object (IANA, BGP Well-known Communities).
var wellKnown = map[string]lb.Community{
	"graceful-shutdown": GracefulShutdown,
	"accept-own":        {A: 65535, B: 1},
	"blackhole":         {A: 65535, B: 666},
	"no-export":         {A: 65535, B: 65281},
	"no-advertise":      {A: 65535, B: 65282},
	"local-as":          {A: 65535, B: 65283},
	"no-peer":           {A: 65535, B: 65284},
}
