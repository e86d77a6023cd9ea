package main

import (
	"fmt"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/notes"
)

// reusing is the kernel parameter by which source ports of connections in TIME_WAIT are used again.
// It is for IPv6 too, and takes effect for connections with TCP timestamps. The kernel's default is
// 2: only from the node to itself.
//
// The end that closes a connection first keeps it in TIME_WAIT for 60 s. Where a client of the
// relay closes first, the relay closes first towards the backend, so each such connection would
// keep one of the node's ports for that backend.
var reusing = notes.Parameter{Path: "ipv4/tcp_tw_reuse", Value: 1, Table: "landfall-settings-tcp",
	Prefix: "tcp-tw-reuse-was-"}

// portReuse has the kernel reuse source ports while the relay serves something.
type portReuse struct {
	parameters kernelParameters
	failures   loop.Failures
	restored   bool           // nothing of Landfall's is set
	noted      map[string]int // what to set back
}

// set enables that, or sets it back.
func (p *portReuse) set(enabled bool) {
	k := p.parameters
	parameter := "net/" + reusing.Path
	again := parameter + " is as it should be"
	if p.noted == nil {
		p.noted = map[string]int{}
	}
	if enabled {
		p.restored = false
		p.failures.Log(k.log, "cannot set a kernel parameter; many short connections through the relay use up the node's "+
			"source ports to a backend", again, p.enable(), "parameter", parameter)
		return
	}
	if p.restored {
		return
	}
	err := k.restorePortReuse(p.noted)
	p.restored = err == nil
	p.failures.Log(k.log, "cannot set a kernel parameter back; trying again", again, err)
}

// enable sets the parameter unless it is set already, and keeps the note.
func (p *portReuse) enable() error {
	k := p.parameters
	was, err := reusing.Read(k.folder, "")
	if err != nil {
		return err
	}
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	if was != reusing.Value {
		if err := reusing.Set(conn, k.folder, "", was); err != nil {
			return err
		}
		k.log.Info("set a kernel parameter, so that connections of the relay keep source ports no longer than they last",
			"parameter", "net/"+reusing.Path, "value", reusing.Value)
	}
	return reusing.Keep(conn, k.folder, p.noted)
}

// restorePortReuse sets back what Landfall has set, by the notes in the kernel and those of this
// program.
func (k kernelParameters) restorePortReuse(noted map[string]int) error {
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	reset, err := reusing.Restore(conn, k.folder, noted)
	if len(reset) > 0 {
		k.log.Info("set a kernel parameter back", "parameter", "net/"+reusing.Path)
	}
	if err != nil {
		return fmt.Errorf("set %s back: %w", reusing.Path, err)
	}
	return nil
}
