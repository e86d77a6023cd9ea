package relay

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A proxy of before there was a version, as it was recorded, does not tell protocols and schedulers as this relay knows
// them. The relay takes no Service from it, and says no port, without which such a proxy leads nothing here.
func TestContract6AProxyOfAnEarlierRelease(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	for h := range g.said { // a proxy of this release hears the ports
		if h.Ports != nil {
			break
		}
	}
	g = newRigOf(t, 0, nil)
	recorded, err := os.ReadFile("../relayfeed/wire/testdata/proxy-without-version.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(recorded) {
		m, err := decodeMessage(line)
		if err != nil {
			t.Fatal(err)
		}
		if !m.Left {
			g.tell <- m
		}
	}
	// What that proxy read of a line, and how long it may have been.
	type hello struct {
		Ports       map[lb.Family]uint16 `json:"ports,omitempty"`
		Leaving     bool                 `json:"leaving,omitempty"`
		Connections int                  `json:"connections,omitempty"`
	}
	const most = 4 << 10
	for range 3 {
		h := <-g.said
		line, err := json.Marshal(h)
		var read hello
		if err != nil || len(line) > most || json.Unmarshal(line, &read) != nil || len(read.Ports) > 0 {
			t.Errorf("it says %s, %v", line, err)
		}
	}
	if len(g.Counts()) > 0 || g.Ready() == nil {
		t.Errorf("it relays %+v", g.Counts())
	}
	go g.stop()
	<-g.left // heeded from any proxy
}
