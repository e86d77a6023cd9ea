package bgp

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestSessionOfAnotherProgram has another program of the node have a connection with the router. The speaker leaves the
// router alone and says why, and connects once the other has gone.
func TestSessionOfAnotherProgram(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	conns := make(chan net.Conn, 10)
	l.router.Serve(t, "10.0.0.2:179", func(conn net.Conn) {
		conns <- conn
		_, _ = conn.Read(make([]byte, 1<<10))
		_, _ = conn.Read(make([]byte, 1)) // until the other end closes
	})
	var other net.Conn
	l.node.Do(t, func() (err error) {
		other, err = net.Dial("tcp", "10.0.0.2:179")
		return err
	})
	<-conns
	a, _ := l.start(t)
	set(a, external(nil))
	eventually(t, a, "the session is another program's", func(s Status) bool {
		return s.State == Idle && s.Reason == lb.ReasonSessionTaken && strings.Contains(s.LastError, "between 10.0.0.1 and")
	})
	select {
	case conn := <-conns:
		t.Errorf("the router has a second connection from %s", conn.RemoteAddr())
	default:
	}
	other.Close()
	if conn := <-conns; !strings.HasPrefix(conn.RemoteAddr().String(), "10.0.0.1:") {
		t.Errorf("a connection from %s", conn.RemoteAddr())
	}
}

// TestReasonOfACollision has the router itself say that it has another session with the node's address.
func TestReasonOfACollision(t *testing.T) {
	for subcode, want := range map[uint8]lb.Reason{
		subCollision:           lb.ReasonSessionTaken,
		subAdministrativeStop:  lb.ReasonNotEstablished,
		subConfigurationChange: lb.ReasonNotEstablished,
	} {
		err := fmt.Errorf("read: %w", &peerError{notification{code: bgp.BGP_ERROR_CEASE, subcode: subcode}})
		if got := reasonOf(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}
