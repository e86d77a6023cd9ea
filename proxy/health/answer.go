package health

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// serviceAnswer is the body on a health port, in the form of kube-proxy.
type serviceAnswer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// serviceHealth is what a health port says of a Service.
type serviceHealth struct {
	key     lb.Key
	local   int // ready endpoints of this node
	healthy bool
	leaving lb.Reason
}

func (a *Actor) serviceHealth(at socket) serviceHealth {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := serviceHealth{healthy: a.healthy(a.deps.Now()), leaving: a.node.Leaving}
	if keys := a.byPort[at.port]; len(keys) > 0 { // or it was taken away while the request was on its way
		h.key = keys[0]
		h.local = a.services[h.key].Local[at.family]
	}
	return h
}

// serviceHandler answers on the health port of a Service, whatever the method: an agent of HAProxy
// on its path, and on every other path as kube-proxy.
func (a *Actor) serviceHandler(at socket) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := a.serviceHealth(at)
		if r.URL.Path == agentPath {
			answerAgent(w, h.agentLine())
			return
		}
		answerService(w, h)
	})
}

// answerService answers 200 when the rules in the kernel deliver to a ready endpoint of this node,
// and the node stays.
func answerService(w http.ResponseWriter, h serviceHealth) {
	var body serviceAnswer
	body.Service.Namespace, body.Service.Name = h.key.Namespace, h.key.Name
	body.LocalEndpoints, body.ServiceProxyHealthy = h.local, h.healthy
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(h.local))
	text, _ := json.MarshalIndent(body, "", "\t") // cannot fail
	answer(w, code(h.local > 0 && h.healthy && h.leaving == ""), text)
}

// nodeAnswer is the body of /healthz and /livez, in the form of kube-proxy.
type nodeAnswer struct {
	LastUpdated  time.Time                  `json:"lastUpdated"`
	CurrentTime  time.Time                  `json:"currentTime"`
	NodeEligible *bool                      `json:"nodeEligible,omitempty"`
	Healthy      bool                       `json:"healthy"`
	Status       map[lb.Family]familyAnswer `json:"status"`
	// Reason is why the node is not eligible.
	Reason lb.Reason `json:"reason,omitempty"`
}

type familyAnswer struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

func (a *Actor) nodeHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { a.answerNode(w, true) })
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { a.answerNode(w, false) })
	return mux
}

// answerNode answers for the node as a whole. Whether the node stays matters to those who send it
// traffic, not to those who would restart us.
func (a *Actor) answerNode(w http.ResponseWriter, eligibility bool) {
	now := a.deps.Now()
	a.mu.Lock()
	body := nodeAnswer{LastUpdated: now, CurrentTime: now, Healthy: a.healthy(now), Status: map[lb.Family]familyAnswer{}}
	for family, oldest := range a.node.Unapplied {
		status := familyAnswer{LastUpdated: now, Healthy: !a.stale(family, now)}
		if !status.Healthy {
			status.LastUpdated = oldest
			if oldest.Before(body.LastUpdated) {
				body.LastUpdated = oldest
			}
		}
		body.Status[family] = status
	}
	eligible := a.node.Known && a.node.Leaving == ""
	body.Reason = a.node.Leaving
	a.mu.Unlock()
	path, ok := "/livez", body.Healthy
	if eligibility {
		path, ok = "/healthz", body.Healthy && eligible
		body.NodeEligible = &eligible
	} else {
		body.Reason = ""
	}
	if a.deps.Answered != nil {
		a.deps.Answered(path, code(ok))
	}
	text, _ := json.Marshal(body) // cannot fail
	answer(w, code(ok), text)
}

func code(ok bool) int {
	if ok {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}

func answer(w http.ResponseWriter, code int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write(body) // the client has gone
}
