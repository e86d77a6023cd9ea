package health

import (
	"fmt"
	"io"
	"net/http"
	"time"
)

// agentPath is what HAProxy's agent-send asks for on a health port: GET /haproxy-agent HTTP/1.0. An
// agent-check reads one line, which comes without a status line and headers: HAProxy would take
// these for the line.
const agentPath = "/haproxy-agent"

// agentLine returns the state of the node for HAProxy's agent-check ("agent-check" in its
// configuration manual): each ready pod counts 100 % of the weight that is configured for the server.
// A node that leaves has the weight 0, which HAProxy shows as DRAIN. The word drain would need the
// word ready to end it, which also ends a drain that an operator asked HAProxy for.
func (h serviceHealth) agentLine() string {
	switch {
	case h.local == 0:
		return "down #no ready pod on this node"
	case !h.healthy:
		return "fail #changes wait for the kernel"
	case h.leaving != "":
		return "up 0%"
	}
	return fmt.Sprintf("up %d%%", 100*h.local)
}

// answerAgent writes a line and ends the connection.
func answerAgent(w http.ResponseWriter, line string) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil { // not with HTTP/1
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer conn.Close()
	_ = conn.SetWriteDeadline(time.Now().Add(writeTimeout)) // a hijacked connection has none
	_, _ = io.WriteString(conn, line+"\n")                  // the client has gone
}
