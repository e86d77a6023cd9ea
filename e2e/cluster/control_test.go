package cluster

import (
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// at returns a loss from one second to another.
func at(from, to float64, timedOut bool) lab.Loss {
	second := func(s float64) time.Time { return time.Unix(0, 0).Add(time.Duration(s * float64(time.Second))) }
	return lab.Loss{Began: second(from), Ended: second(to), TimedOut: timedOut}
}

// Only a connection that timed out while the same client's control connections did is not judged.
func TestControl(t *testing.T) {
	control := outages([]lab.Loss{at(11, 13, true), at(10, 12, true), at(50, 52, true), at(30, 31, false)}, nil)
	if len(control) != 2 || control[0].to.Sub(control[0].from) != 3*time.Second {
		t.Fatalf("outages %v", control)
	}
	for name, c := range map[string]struct {
		lost    loss
		excused bool
	}{
		"during an outage":   {loss{host: "client", Loss: at(10.1, 12.1, true)}, true},
		"half of it":         {loss{host: "client", Loss: at(12, 14, true)}, true},
		"less of it":         {loss{host: "client", Loss: at(12.1, 14.1, true)}, false},
		"a long-lived one":   {loss{host: "client", Loss: at(9, 14, true), long: true}, true},
		"longer than it":     {loss{host: "client", Loss: at(8, 15, true), long: true}, false},
		"another time":       {loss{host: "client", Loss: at(20, 22, true)}, false},
		"refused":            {loss{host: "client", Loss: at(10, 12, false)}, false},
		"control is refused": {loss{host: "client", Loss: at(30, 31, true)}, false},
		"another client's":   {loss{host: "far-client", Loss: at(10.1, 12.1, true)}, false},
	} {
		c.lost.to, c.lost.Why = "web", "late"
		o := Outcome{New: 100, Long: 100, lost: []loss{c.lost}}
		if c.lost.long {
			o.Broken = 1
		} else {
			o.Failed = 1
		}
		o.judge("client", 200*time.Second, control)
		if got := o.NotJudged == 1; got != c.excused || (o.Broken+o.Failed == 0) != c.excused {
			t.Errorf("%s: %s", name, o)
		}
		if err := o.Err(); (err == nil) != c.excused ||
			err != nil && !strings.Contains(err.Error(), c.lost.host+" to web: late") {
			t.Errorf("%s: %v", name, err)
		}
		if o.Unjudged != 5*time.Second || !strings.Contains(o.String(), "5.0 of 200 s are not judged") {
			t.Errorf("%s: %s", name, o)
		}
	}
}

// A story in which too much was not judged has shown nothing.
func TestTooBusyToTell(t *testing.T) {
	var o Outcome
	o.judge("client", 100*time.Second, outages([]lab.Loss{at(10, 15, true)}, nil))
	if err := o.Err(); err != nil {
		t.Error(err)
	}
	o.judge("far-client", 100*time.Second, outages([]lab.Loss{at(10, 16, true)}, nil))
	if err := o.Err(); err == nil || !strings.Contains(err.Error(), "too busy") {
		t.Errorf("%v, of %s", err, o)
	}
}

// While the control client's answers are late, what times out is not judged; what does not is.
func TestLateControl(t *testing.T) {
	late := outages(nil, []lab.Loss{at(10, 13, true), at(12, 15, true), at(40, 90, true)})
	o := Outcome{New: 100, Failed: 2, lost: []loss{{host: "client", Loss: at(9, 14, true)},
		{host: "client", Loss: at(11, 12, false)}}}
	o.judge("client", 200*time.Second, late)
	if o.Failed != 1 || o.NotJudged != 1 || o.Unjudged != 5*time.Second {
		t.Errorf("%s", o)
	}
}
