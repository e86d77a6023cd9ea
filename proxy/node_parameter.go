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

// liberal is the kernel parameter by which conntrack finds no packet of TCP invalid for its window.
var liberal = notes.Parameter{Path: parameterLiberal, Value: 1, Table: "landfall-settings-conntrack",
	Prefix: "tcp-be-liberal-was-"}

// nodeParameter is a kernel parameter of the node that is set while Landfall needs it, and set back then.
type nodeParameter struct {
	notes.Parameter
	parameters kernelParameters
	why, lack  string // the log's words: what it is set for, and what is so where it cannot be
	failures   loop.Failures
	restored   bool           // nothing of Landfall's is set
	noted      map[string]int // what to set back
}

// newPortReuse returns what has the kernel reuse source ports, while the relay serves something.
func newPortReuse(parameters kernelParameters) *nodeParameter {
	return &nodeParameter{Parameter: reusing, parameters: parameters,
		why: "so that connections of the relay keep source ports no longer than they last",
		lack: "cannot set a kernel parameter; many short connections through the relay use up the node's source ports to a " +
			"backend"}
}

// newLiberal returns what has conntrack be liberal, while the flag says so.
func newLiberal(parameters kernelParameters) *nodeParameter {
	return &nodeParameter{Parameter: liberal, parameters: parameters,
		why:  "so that conntrack finds no packet of TCP invalid for its window",
		lack: "cannot set a kernel parameter and note what it was"}
}

// set sets the parameter, or sets it back.
func (p *nodeParameter) set(enabled bool) {
	k := p.parameters
	parameter := "net/" + p.Path
	again := parameter + " is as it should be"
	if p.noted == nil {
		p.noted = map[string]int{}
	}
	if enabled {
		p.restored = false
		p.failures.Log(k.log, p.lack, again, p.enable(), "parameter", parameter)
		return
	}
	if p.restored {
		return
	}
	err := k.restore(p.Parameter, p.noted)
	p.restored = err == nil
	p.failures.Log(k.log, "cannot set a kernel parameter back; trying again", again, err)
}

// enable sets the parameter unless it is set already, and keeps the note.
func (p *nodeParameter) enable() error {
	k := p.parameters
	was, err := p.Read(k.folder, "")
	if err != nil {
		return err
	}
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	if was != p.Value {
		if err := p.Set(conn, k.folder, "", was); err != nil {
			return err
		}
		k.log.Info("set a kernel parameter, "+p.why, "parameter", "net/"+p.Path, "value", p.Value)
	}
	return p.Keep(conn, k.folder, p.noted)
}

// restore sets back what Landfall has set, by the notes in the kernel and those of this program.
func (k kernelParameters) restore(p notes.Parameter, noted map[string]int) error {
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	reset, err := p.Restore(conn, k.folder, noted)
	if len(reset) > 0 {
		k.log.Info("set a kernel parameter back", "parameter", "net/"+p.Path)
	}
	if err != nil {
		return fmt.Errorf("set %s back: %w", p.Path, err)
	}
	return nil
}
