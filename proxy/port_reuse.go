package main

import (
	"fmt"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/portreuse"
)

// portReuse has the kernel reuse source ports while the relay serves something: see portreuse.
type portReuse struct {
	parameters kernelParameters
	failures   loop.Failures
	restored   bool // nothing of Landfall's is set
	was        *int // what to set back; nil for nothing
}

// set enables that, or sets it back.
func (p *portReuse) set(enabled bool) {
	k := p.parameters
	const parameter = "net/" + portreuse.Parameter
	const again = parameter + " is as it should be"
	if enabled {
		changed, err := portreuse.Enable(k.folder)
		if changed {
			k.log.Info("set a kernel parameter, so that connections of the relay keep source ports no longer than they last",
				"parameter", parameter, "value", 1)
		}
		if err == nil {
			p.was, err = portreuse.Keep(k.folder, p.was)
		}
		p.restored = false
		p.failures.Log(k.log, "cannot set a kernel parameter; many short connections through the relay use up the node's "+
			"source ports to a backend", again, err, "parameter", parameter)
		return
	}
	if p.restored {
		return
	}
	var err error
	if p.was, err = portreuse.Keep(k.folder, p.was); err == nil {
		err = k.restorePortReuse()
	}
	if err == nil {
		p.restored, p.was = true, nil
	}
	p.failures.Log(k.log, "cannot set a kernel parameter back; trying again", again, err)
}

// restorePortReuse sets back what Landfall has set.
func (k kernelParameters) restorePortReuse() error {
	changed, err := portreuse.Restore(k.folder)
	if changed {
		k.log.Info("set a kernel parameter back", "parameter", "net/"+portreuse.Parameter)
	}
	if err != nil {
		return fmt.Errorf("set %s back: %w", portreuse.Parameter, err)
	}
	return nil
}
